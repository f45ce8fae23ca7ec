"""Write the videos that an inference JSON asks for."""

from tessera_compat.mindspeed_mm.entry_points import inference_sora, run_command

if __name__ == "__main__":
    run_command(inference_sora)
