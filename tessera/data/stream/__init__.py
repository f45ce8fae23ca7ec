"""Streamed data sets (`data.stream`): files are downloaded while a run goes on."""
