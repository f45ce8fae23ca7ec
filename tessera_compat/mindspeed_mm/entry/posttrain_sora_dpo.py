"""Train a generation model on pairs of videos, a better and a worse one."""

from tessera_compat.mindspeed_mm.entry_points import posttrain_sora_dpo, run_command

if __name__ == "__main__":
    run_command(posttrain_sora_dpo)
