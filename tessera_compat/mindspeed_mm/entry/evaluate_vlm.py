"""Run a benchmark by an evaluation JSON."""

from tessera_compat.mindspeed_mm.entry_points import evaluate, run_command

if __name__ == "__main__":
    run_command(evaluate)
