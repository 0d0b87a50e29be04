"""Text in and text out: what stands between a user's words and token ids.

    vocabulary      what a file says about its tokens, checked; over fields
    pretokenizers   how BPE vocabularies cut words
    spm, bpe        the two ways of merging, on the `tokenizers` library
    tokenizer       text to ids and back
    stream          ids to text, piece by piece; stop strings
    chat            chat templates; sandbox, filters, budget run them with bounds

Knows GGUF metadata; knows no graphs.
"""
