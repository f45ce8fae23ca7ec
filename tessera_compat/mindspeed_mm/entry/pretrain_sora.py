"""Train a model of image or video generation by flags and JSON files."""

from tessera_compat.mindspeed_mm.entry_points import pretrain, run_command

if __name__ == "__main__":
    run_command(pretrain)
