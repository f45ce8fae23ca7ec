"""Train by the YAML file of the FSDP2 trainer."""

from tessera_compat.mindspeed_mm.entry_points import pretrain_fsdp2, run_command

if __name__ == "__main__":
    run_command(pretrain_fsdp2)
