"""The loop, and the side jobs around it. Called, it trains: `tessera.train("recipe.yaml")` is `train.run.train`."""

from tessera.core.verbs import make_verb

make_verb(__name__, "tessera.train.run:train")
