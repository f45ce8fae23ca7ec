"""Rows of data that is fetched while a run goes on."""
