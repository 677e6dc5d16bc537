"""The recipe that made the bundled demo pair: corpus, tokenizer, target, distilled draft, measurements."""
