"""`tessera data doctor`: every row looked at before a run does: what is wrong with it, and how to mend that."""
