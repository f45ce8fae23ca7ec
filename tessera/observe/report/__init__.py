"""Draw the report of a run: a page with curves, figures, previews and answers."""
