"""Write the videos of a VBench evaluation JSON."""

from tessera_compat.mindspeed_mm.entry_points import evaluate_gen, run_command

if __name__ == "__main__":
    run_command(evaluate_gen)
