"""Which tokens begin and end texts: as transformers resolves them from the files of a folder."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the other side of the comparison")
import transformers

from te_models.checkpoints.folder.special_tokens import SpecialTokenError, model_tokens, named_tokens
from te_models.tokenizer import document_end, ends_of, read_tokenizer
from te_models.training import DataError, DocumentOptions, build_dataset
from te_models.training.data import documents
from te_models.training.data.encoder import load_encoder
from tests.te_models.hf_models import hf_model
from tests.te_models.text.chats import KINDS, TEXT, make_folder, make_tokenizer

pytestmark = pytest.mark.usefixtures("shared_tokenizer_process")


def edit(path: Path, **values: Any) -> None:
    """Set fields of a JSON file; `...` takes one away."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found = {name: value for name, value in (found | values).items() if value is not ...}
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("kind", "named_class"), [*((kind, None) for kind in KINDS), ("legacy prepend", "LlamaTokenizer")]
)
def test_documents_are_the_tokenizer_s_texts(kind: str, named_class: str | None, tmp_path: Path) -> None:
    """Of every kind, with what it puts before a text, and as the class that a folder names reads it."""
    from tokenizers import processors

    made = make_tokenizer(kind)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **settings).save_pretrained(tmp_path / "t")
    if named_class is not None:
        edit(tmp_path / "t" / "tokenizer_config.json", tokenizer_class=named_class)
    texts = [TEXT[0], "tell me <s> more", "  two  spaces\n\nand lines "]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    found = build_dataset(tmp_path / "d", [tmp_path / "a.jsonl"], str(tmp_path / "t"))
    assert found.tokens.tolist() == [id for text in texts for id in [*theirs(text)["input_ids"], theirs.eos_token_id]]
    options = DocumentOptions(add_bos_token=False, add_eos_token=False)
    found = build_dataset(tmp_path / "e", [tmp_path / "a.jsonl"], str(tmp_path / "t"), options=options)
    plain = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert found.tokens.tolist() == [id for ids in plain for id in ids]
    if named_class is not None:
        raw = make_tokenizer(kind).encode(texts[1], add_special_tokens=False).ids
        assert raw != plain[1], "the class reads texts otherwise than the file alone says"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_read_in_pieces_has_the_tokens_of_the_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", 40)
    theirs = make_folder(tmp_path / "t", kind, "chatml")
    text = "".join(f"{line}\n{'' if i % 3 else '  ' * i}\n" for i, line in enumerate(TEXT * 3))
    (tmp_path / "a.txt").write_text(text)
    found = build_dataset(tmp_path / "d", [tmp_path / "a.txt"], str(tmp_path / "t"))
    assert found.tokens.tolist() == [*theirs(text)["input_ids"], 2]


def test_a_tokenizer_that_ends_texts_itself_gets_no_second_end(tmp_path: Path) -> None:
    from tokenizers import processors

    made = make_tokenizer("word piece")
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path))
    assert (encoder.before, encoder.behind) == ((1,), (2,))


def test_who_names_the_end_of_a_text(tmp_path: Path) -> None:
    """Each place in turn, the later ones only where the earlier say nothing."""
    folder = tmp_path / "t"
    make_folder(folder, "byte-level", "chatml")
    settings, made = folder / "tokenizer_config.json", make_tokenizer("byte-level")
    end = {name: made.token_to_id(name) for name in ("</s>", "<|im_end|>", "<|end|>", "<|endoftext|>")}
    (folder / "generation_config.json").unlink()

    def found() -> int | None:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = read_tokenizer(folder, "this test")
        assert (ours.eos, ours.bos) == (theirs.eos_token_id, theirs.bos_token_id)
        return document_end(folder, ours)

    edit(folder / "special_tokens_map.json", eos_token={"content": "<|im_end|>"})
    edit(settings, added_tokens_decoder={}, eos_token="</s>")
    assert found() == end["</s>"], "the settings list the tokens themselves: the map is not read"
    edit(settings, added_tokens_decoder=...)
    assert found() == end["<|im_end|>"]
    (folder / "special_tokens_map.json").unlink()
    assert found() == end["</s>"]
    edit(settings, eos_token=...)
    assert found() is None
    with pytest.raises(DataError, match=r"names no token that ends a text \(eos_token\), so that documents would run"):
        load_encoder(str(folder))
    assert load_encoder(str(folder), options=DocumentOptions(eos_token="</s>")).behind == (end["</s>"],)
    edit(folder / "config.json", eos_token_id=[end["<|end|>"], 3])
    assert found() == end["<|end|>"]
    edit(folder / "generation_config.json", eos_token_id=end["<|endoftext|>"])
    assert found() == end["<|endoftext|>"] and load_encoder(str(folder)).behind == (end["<|endoftext|>"],)
    for options, says in (
        (DocumentOptions(eos_token="<none>"), "eos_token is '<none>', which the tokenizer of .* does not have"),
        (DocumentOptions(add_bos_token=True), "names no token that begins a text"),
    ):
        edit(settings, bos_token=...)
        with pytest.raises(DataError, match=says):
            load_encoder(str(folder), options=options)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_damaged_names_are_one_sentence(name: str, tmp_path: Path) -> None:
    for value in (3, ["x"], {"content": 3}):
        edit(tmp_path / name, eos_token=value)
        with pytest.raises(SpecialTokenError, match=f"{name} has an eos_token that is a"):
            named_tokens(tmp_path)
    for file in ("generation_config.json", "config.json"):
        for bad in ("2", [1, "2"], 2.5, True):
            edit(tmp_path / file, eos_token_id=bad)
            with pytest.raises(SpecialTokenError, match=f"{file} has the eos_token_id .*; allowed: a number or a list"):
                model_tokens(tmp_path)


def test_generation_ends_where_transformers_ends_it(tmp_path: Path) -> None:
    """By one file or the other, with one id or several; of an imported folder, too."""
    from te_models.checkpoints import import_hf

    with warnings.catch_warnings(action="ignore"):
        hf_model("llama").save_pretrained(tmp_path / "m")
    generation = tmp_path / "m" / "generation_config.json"
    for number, (in_generation, in_config) in enumerate(((5, 7), ([5, 6], 7), ("none", 7), ("none", [7, 8]))):
        generation.unlink(missing_ok=True)
        if in_generation != "none":
            edit(generation, eos_token_id=in_generation)
        edit(tmp_path / "m" / "config.json", eos_token_id=in_config)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id
        expected = theirs if isinstance(theirs, list) else [theirs]
        import_hf(tmp_path / "m", tmp_path / f"te{number}")
        for folder in (tmp_path / "m", tmp_path / f"te{number}"):
            assert ends_of(folder, None) == expected


@pytest.mark.parametrize(("case", "kind"), [("llama", "legacy prepend"), ("qwen2", "byte-level")])
def test_an_imported_folder_reads_texts_as_its_original(case: str, kind: str, tmp_path: Path) -> None:
    """The kind of model decides which class reads a tokenizer, and ours is unknown to transformers."""
    from te_models.checkpoints import import_hf

    with warnings.catch_warnings(action="ignore"):
        hf_model(case).save_pretrained(tmp_path / "m")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(kind), **settings).save_pretrained(
        tmp_path / "m"
    )
    if case == "llama":
        edit(tmp_path / "m" / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    import_hf(tmp_path / "m", tmp_path / "te")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    for text in ("tell me <s> more", "12345 cafe\u0301  x"):
        for folder in (tmp_path / "m", tmp_path / "te"):
            assert read_tokenizer(folder, "this test").encode(text) == theirs(text)["input_ids"]


def test_an_export_names_the_ids_that_the_tokenizer_alone_said(tmp_path: Path) -> None:
    """Of a model that was trained from random weights: transformers ends its texts, and pads; said ids stay as said."""
    from te_models import GPTModel
    from te_models.checkpoints import export_hf, import_hf
    from tests.build import tiny

    made = make_tokenizer("byte-level")
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}
    GPTModel(tiny(vocab_size=made.get_vocab_size())).save_pretrained(tmp_path / "te")
    assert export_hf(tmp_path / "te", tmp_path / "none").notes == ()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **tokens).save_pretrained(tmp_path / "te")
    plan = export_hf(tmp_path / "te", tmp_path / "hf")
    end = made.token_to_id("<|im_end|>")
    assert f"eos_token_id = {end}" in plan.notes[-1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    generation = theirs.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, end, 2)
    assert (theirs.config.eos_token_id, theirs.config.pad_token_id) == (end, None), "a row of the embedding is trained"
    import_hf(tmp_path / "hf", tmp_path / "again")
    edit(tmp_path / "again" / "generation_config.json", eos_token_id=[7, end])
    assert export_hf(tmp_path / "again", tmp_path / "last", verify=False).notes == ()
    assert json.loads((tmp_path / "last" / "generation_config.json").read_text())["eos_token_id"] == [7, end]
    (tmp_path / "te" / "tokenizer_config.json").write_text("[")
    assert export_hf(tmp_path / "te", tmp_path / "damaged", verify=False).notes == ()
