"""Text to token ids and back.

    vocabulary      the tokens of a file, checked
    pretokenizers   how BPE vocabularies cut a text into words
    spm, bpe        the two kinds of vocabularies, which merge letters into tokens by score or by rank
    tokenizer       text to ids and back
    stream          ids to text, piece by piece; stop strings
    chat            chat templates; sandbox, environment, filters and budget run them within limits of time and memory
    marks           keeps names of control tokens in untrusted messages from becoming these tokens

Depends on GGUF metadata, not on graphs.
"""
