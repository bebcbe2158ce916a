"""Topic models of texts: tokenizer, vocabulary, models, and agreement on words between parties."""

LANGUAGES = ("english", "german", "french", "spanish", "italian", "none")
"""Languages with a list of stop words."""

COHERENCES = ("npmi", "c_v", "vectors")

TOP = 10
"""Number of top words that represent a topic."""
