"""Offer the surfaces of Megatron and MindSpeed-MM: the only package that looks like somebody else's API."""
