"""Writes the three BERTs for chemical reactions from the package rxnfp as folders that transformers reads.

    pip download --no-deps rxnfp==0.1.0 && unzip -q rxnfp-0.1.0-py3-none-any.whl -d package
    python benchmarks/rxnfp.py package/rxnfp/models/transformers rxnfp
    acutance lab layers hf:rxnfp/bert_ft --text rxnfp/reactions --json bert_ft.json

Their tokens are atoms, bonds and brackets of a SMILES, which no tokenizer of transformers knows. OUT/reactions gets the
reactions of docs/evidence/language/reactions.txt, one per file, so that a window never holds two.
"""

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import BertForMaskedLM, BertModel, PreTrainedTokenizerFast

REACTIONS = Path(__file__).parents[1] / "docs" / "evidence" / "language" / "reactions.txt"
# Atoms in brackets, elements with two letters, >> before the products, rings with two digits; else single characters.
TOKEN = r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|."


def tokenizer_of(vocabulary: Path) -> PreTrainedTokenizerFast:
    places = {token: place for place, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    ends = [(token, places[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the folder of the models")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    for vocabulary in sorted(arguments.package.glob("*/vocab.txt")):
        folder = arguments.out / vocabulary.parent.name
        # Its head guesses masked tokens; those of the others classify reactions.
        kind = BertForMaskedLM if folder.name == "bert_pretrained" else BertModel
        kind.from_pretrained(vocabulary.parent).save_pretrained(folder)
        tokenizer_of(vocabulary).save_pretrained(folder)
        print(folder)
    reactions = arguments.out / "reactions"
    reactions.mkdir(parents=True, exist_ok=True)
    for number, reaction in enumerate(REACTIONS.read_text(encoding="utf-8").split()):
        (reactions / f"{number:02}.txt").write_text(reaction, encoding="utf-8")


if __name__ == "__main__":
    main()
