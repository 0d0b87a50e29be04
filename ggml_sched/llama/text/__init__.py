"""Text in and text out: what stands between a user's words and token ids.

    vocabulary      what a file says about its tokens, checked
    pretokenizers   how BPE vocabularies cut words
    spm, bpe        the two ways of merging, on the `tokenizers` library
    tokenizer       text to ids and back
    stream          ids to text, piece by piece; stop strings
    sandbox, chat   chat templates

Knows GGUF metadata; knows no graphs.
"""
