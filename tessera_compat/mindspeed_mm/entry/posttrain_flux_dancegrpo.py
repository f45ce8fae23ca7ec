"""End with an error: Tessera does not support the models of this entry point yet."""

from tessera_compat.mindspeed_mm.entry_points import refuse

if __name__ == "__main__":
    refuse("posttrain_flux_dancegrpo.py")
