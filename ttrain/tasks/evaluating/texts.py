"""eval.text: loss, perplexity and bits per byte of documents."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np

from ttrain.core.errors import DataError, UserError
from ttrain.core.names import listed
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import DocumentReader, DocumentSource, find_sources
from ttrain.data.tokenizer import named_place
from ttrain.tasks.evaluating.scorer import Scorer
from ttrain.tasks.evaluating.windows import Texts


def measure_texts(
    scorer: Scorer, sources: list[str], text_key: str, limit: int | None, stride: int | None
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of all documents of files. Raises DataError for what can't be read."""
    from tqdm import tqdm

    given = scorer.given
    chat_key = getattr(given.config.data, "chat_key", DocumentsConfig().chat_key)
    template = given.template or DocumentsConfig().template
    config = DocumentsConfig(sources=sources, text_key=text_key, chat_key=chat_key, template=template)
    found = find_sources(config)
    reader = DocumentReader(config, given.conversations() if given.template else None, learns=False)
    documents = list(islice(reader.in_turn(found, [len] * len(found)), limit))
    chat = next((document for document in documents if document.replies is not None), None)
    if chat is not None and given.template is None:
        try:
            given.conversations()
        except UserError as error:
            raise DataError(f"{chat.place} is a conversation. {error}") from None
    texts = [document.text for document in documents]
    with named_place(lambda wanted: next(each.place for each in documents if wanted.search(each.text))):
        encoded = [np.asarray(ids) for ids in scorer.tokenizer.encode_documents(texts)]
    size, first = sum(len(text.encode()) for text in texts), scorer.tokenizer.byte_counts()[1]
    for number, ids in enumerate(encoded):  # without a token before it, the first of a document is only read
        if scorer.start is None or ids[:1].tolist() == [scorer.start]:  # which a template may have written
            size -= int(first[ids[0]]) if len(ids) else 0
        else:
            encoded[number] = np.concatenate([[scorer.start], ids])
    data = Texts.of(encoded, scorer.context, stride)
    tokens = sum(max(0, len(ids) - 1) for ids in encoded)
    if not tokens or not size:
        raise DataError(f"eval.text={','.join(sources)} has nothing to predict: its documents have a token each.")
    with tqdm(total=data.val_samples, desc="predicting text", unit="seq") as bar:
        loss = scorer.loss(data, lambda rows: bar.update(min(rows, data.val_samples - bar.n)), listed(sources))
    return {
        "source": sources,
        "documents": len(texts),
        "tokens": tokens,
        "bytes": size,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss * tokens / math.log(2) / size,
        "first_tokens_predicted": scorer.start is not None,
        "notices": _notices(found, reader),
    }


def _notices(found: list[DocumentSource], reader: DocumentReader) -> list[str]:
    """Return sentences about what of eval.text is not read, or is read otherwise than its name says."""
    told = [note.replace("data.sources:", "eval.text:") for each in found for note in each.notices]
    told += [f"eval.text: {note}" for note in reader.skipped.notices()]
    key, instead = "data.suffixes says which are.", "Name them in eval.text to have them read as text."
    return [note.replace(key, instead) for note in told]
