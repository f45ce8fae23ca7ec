"""Train a vision-language model on pairs of answers."""

from tessera_compat.mindspeed_mm.entry_points import posttrain_dpo, run_command

if __name__ == "__main__":
    run_command(posttrain_dpo)
