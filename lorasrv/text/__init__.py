"""Text in and out: tokenizer, chat template, detokenizer, structured output, tool parsers."""
