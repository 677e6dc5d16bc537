"""The nouns that coordinator and services share, and what is computed of them: sampling, vocabularies, grammars."""
