"""Refuse a job whose models are not here yet, with the reason."""

from tessera_compat.mindspeed_mm.entry_points import refuse

if __name__ == "__main__":
    refuse("evaluate_gen.py")
