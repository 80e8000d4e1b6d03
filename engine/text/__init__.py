"""Between text and tokens: tokenizer, chat template, streamed text, stop strings."""
