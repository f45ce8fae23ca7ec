"""Parts that several model families share: text decoder, vision configuration, processors, family helpers."""
