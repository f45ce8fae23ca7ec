"""Measuring what a model has learnt. Called, it measures: `tessera.evaluate(run)` is `evaluate.answers.evaluate`."""

from tessera.core.verbs import make_verb

make_verb(__name__, "tessera.evaluate.answers:evaluate")
