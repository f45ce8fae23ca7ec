"""Train a model of a Hugging Face folder, by flags or by a YAML file."""

from tessera_compat.mindspeed_mm.entry_points import pretrain, run_command

if __name__ == "__main__":
    run_command(pretrain)
