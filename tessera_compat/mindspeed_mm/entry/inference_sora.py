"""Write the videos of an inference JSON."""

from tessera_compat.mindspeed_mm.entry_points import inference_sora, run_command

if __name__ == "__main__":
    run_command(inference_sora)
