"""Train multimodal models: models that see, listen and imagine."""
