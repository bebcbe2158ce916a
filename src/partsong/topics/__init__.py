"""Topics of texts: from texts to words, to models, and between parties."""

LANGUAGES = ("english", "german", "french", "spanish", "italian", "none")
"""Lists of stop words."""

COHERENCES = ("npmi", "c_v", "vectors")

TOP = 10
"""Words that stand for a topic."""
