"""The draft once more, with a tokenizer of another kind: `python -m models.demo.recipe.other_tokenizer`.

A draft and a target with different tokenizers need a vocabulary mapping; this model is either side of such a pair.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.demo.recipe.architecture import (
    END_OF_TEXT_ID,
    MAX_LENGTH,
    load_model,
    packed,
    save_folder,
    write_json,
)
from models.demo.recipe.corpus import (
    END_OF_TEXT,
    SPLIT_PATTERN,
    SourceFile,
    load_tokenizer,
    read_corpus,
    with_chat,
)
from models.demo.recipe.measure import DEMO_FOLDER, held_out_loss, options_of
from models.demo.recipe.training import own_texts, pretrain

VOCABULARY_SIZE = 2560
SPACE = "▁"
"""Stands for a space, as in sentencepiece."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Tokens of bytes, for characters that the vocabulary lacks."""
RATE = 0.3
"""Learning rates as a share of those for a model that begins with random weights."""

logger = logging.getLogger("models.demo.recipe")


def train_unigram(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn a unigram vocabulary with byte fallback, as sentencepiece has them, from the training texts."""
    trained = _unigram([("<unk>", 0.0)])
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY_SIZE - len(BYTES) - 1, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    pieces: list[tuple[str, float]] = json.loads(trained.to_str())["model"]["vocab"]
    scores = {piece: score for piece, score in pieces if piece != "<unk>"}
    lowest = min(scores.values())
    first = [(END_OF_TEXT, lowest), ("<unk>", lowest), *((byte, lowest) for byte in BYTES)]
    tokenizer = _unigram([*first, *scores.items()], unk_id=1, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return with_chat(tokenizer, MAX_LENGTH)


def _unigram(
    pieces: Sequence[tuple[str, float]], unk_id: int = 0, *, byte_fallback: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([*pieces], unk_id=unk_id, byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # The pair's own words, with the mark for each blank.
    pattern = SPLIT_PATTERN.replace(" ?", f"{SPACE}?").replace(r"[ \t]", rf"[{SPACE}\t]")
    pattern = pattern.replace(r"[^\s\p{L}", rf"[^\s{SPACE}\p{{L}}")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return tokenizer


@torch.no_grad()
def moved(
    model: LlamaForCausalLM, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """The model with another tokenizer's tokens: each begins as the mean of what the old tokenizer splits it into (Gee
    et al. 2022, "Fast Vocabulary Transfer for Language Model Compression")."""
    embedding = model.model.embed_tokens.weight.detach().clone()
    pieces = sorted(new.get_vocab().items(), key=lambda item: item[1])
    rows: list[Tensor] = []
    for piece, _ in pieces:
        if piece in BYTES:
            mark = bytes([BYTES.index(piece)]).decode("latin-1")
            ids = old(mark)["input_ids"][-1:]
        else:
            ids = old(piece.replace(SPACE, " "))["input_ids"] or [END_OF_TEXT_ID]
        rows.append(embedding[ids].mean(dim=0))
    model.resize_token_embeddings(len(rows))
    model.model.embed_tokens.weight.copy_(torch.stack(rows))
    return model


def main() -> None:
    """Move the draft to a tokenizer of another kind, and train it on the corpus and on the target's own text."""
    options = options_of(main.__doc__, DEMO_FOLDER / "unigram", minutes_writing=3.0, minutes=8.0)
    corpus = read_corpus()
    tokenizer = train_unigram(file.text for file in corpus)
    draft = DEMO_FOLDER / "draft"
    model = moved(load_model(draft), load_tokenizer(draft), tokenizer)
    target = DEMO_FOLDER / "target"
    texts = own_texts(load_model(target), target, options.minutes_writing, 1, 96, 0)
    old = load_tokenizer(target)
    written = [SourceFile("", text) for _, each in texts for text in old.batch_decode(each.tokens)]
    logger.info("the target wrote %d texts", len(written))
    held_out = packed(read_corpus(held_out=True), tokenizer)
    figures = {"held_out_loss_before": held_out_loss(model, held_out)}
    # The target's own text counts double, since that is what a draft has to foresee.
    files = [*corpus, *written, *written]
    random.Random(0).shuffle(files)
    figures["tokens_seen"] = pretrain(model, packed(files, tokenizer), options.minutes, rate=RATE)
    save_folder(model, tokenizer, options.output)
    figures["held_out_loss"] = held_out_loss(load_model(options.output), held_out)
    logger.info("%s", figures)
    write_json(figures, options.output / "figures.json")


if __name__ == "__main__":
    main()
