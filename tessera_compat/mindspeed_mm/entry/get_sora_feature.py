"""Write latents and embeddings of a job's videos, to train on them."""

from tessera_compat.mindspeed_mm.entry_points import extract_features, run_command

if __name__ == "__main__":
    run_command(extract_features)
