"""A corpus that anyone can rebuild to the same bits: the text of pinned source packages, and a BPE made from it.

    python -m benchmarks.corpus OUT

Downloads the packages below from PyPI once, and checks each against its digest. A document is a file of program text
or documentation. Duplicates are removed, and documents are ordered by their hash, so that both ends of the data are
like the rest. About one document in a hundred, chosen by its hash, is for validation. No document is in both parts.
Writes OUT/tokenizer.json, OUT/train.bin, OUT/validation.bin (uint16) and OUT/corpus.json, and prints the hashes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks.command_line import make_parser
from policyc.models.llama.corpora import train_tokenizer, write_tokens

PACKAGES = {
    "astropy-8.0.2.tar.gz": "955702089e6da0fc00846d309034ad74e13ebcadc67b1c5cef397ae0597473fa",
    "celery-5.7.0.tar.gz": "eff7166bfd22cbd0dd4f77715ddd207881c1332cd1f304d79b1a123aff7cdf10",
    "cython-3.3.1.tar.gz": "99ca18e324972e5cac914816fdd7bb03e19a455b90039c277a538f7781b50c85",
    "django-6.1.3.tar.gz": "557949a609ea76ec51404b482932e33f1e6858946b920232c11b11a25bea3032",
    "docutils-0.23.tar.gz": "39a45180d9afc57e8fca05601dd652bdff19604c218814037fe90ffc7625a50a",
    "jax-0.12.0.1.tar.gz": "2e5b5b7f007852809973310ed99eede7db6e9e1cd60914f8fe90b091ae264db4",
    "matplotlib-3.11.2.tar.gz": "e7c89aa712a0afb882649424dd8de8ad9aa6235e796e84c6052e8f6dc1598d0d",
    "mercurial-7.2.4.tar.gz": "de41e6fc64d51a04d430dfd1aa1f1643b3c831787c00d3a3431fca5492b1bc29",
    "mypy-2.4.1.tar.gz": "4a3c78ecece71ee4b5445389a4ccd11627cfb9c69e4de554d11060171f376305",
    "networkx-3.7.tar.gz": "dc763af777226b63a5e64a6b36b1ec5855c14e2b94a37096d4760e595fc43511",
    "numpy-2.5.4.tar.gz": "95b0c7453d0b6e2073c3264468b106ee1563750cecc910965e67357e3698c83e",
    "pandas-3.1.1.tar.gz": "17ca24c6bc92aca3d366146358e47f1d374c0e1a50763ef226fc71eff20a63fb",
    "pytest-9.2.0.tar.gz": "7942bb4641652e58dedeac2ec51abc1f8cae4fee4ec63899a0999016229a0f2a",
    "scikit_learn-1.9.1.tar.gz": "d2ebeaf5e07fcc0da7149b0e084f24e54edd7441b9a89ce7e034032ae97fe3a0",
    "scipy-1.18.1.tar.gz": "7e7466de6258867beb2ef08f35f9f2ac017a52cacd5081714d239ff1a442d458",
    "scrapy-2.19.0.tar.gz": "7abd5a65f4d9319bf1533472a446915b941f393f6d2d547bf88cec23207beddf",
    "sphinx-9.2.0.tar.gz": "64d4413466f0be8b1cb0e3e43893a148b96d7462d0923d82b4166b21afc5f30c",
    "sqlalchemy-2.1.8.tar.gz": "9ce72855174facf54a83b4fa3eddcece3631c6bdae43605dacd69cc3b6794319",
    "statsmodels-0.15.0.tar.gz": "a81fa3cbf6ed7cf6286afec694bfef561f3e51483197716717fb8476f1f0c50e",
    "sympy-1.14.0.tar.gz": "83d3803453b36afefb7c2bb238361cd4ae6125a569b4db67cd9e79846ba2d68c",
    "twisted-26.10.0.tar.gz": "fe31a5f99ae7f1550914b0702b8f78118d95a79da20525d26fbc1b2ab42bc8ae",
    "xarray-2026.9.0.tar.gz": "fff5781c70b234f54e0401f4f7c4427a7486da38d50dbb138c7d7c55144b3d86",
}
"""Source packages, and the BLAKE2b-256 digest of each, which is also its address on PyPI."""

SUFFIXES = (".py", ".pyi", ".pyx", ".rst", ".md", ".txt")
SIZES = range(256, 200_001)
"""Bytes of a document. Shorter files have little content; longer ones are mostly tables or generated."""
LEAST_LETTERS = 0.5
"""Fraction of a document's bytes that must be letters: a file with fewer is a table of numbers."""
VALIDATION = 0.01
"""Fraction of the documents that is for validation."""
SAMPLE = 0.125
"""Fraction of the documents that the BPE is trained on."""
VOCABULARY = 8192
NAMES = {False: "train", True: "validation"}
CORPUS_SHA256 = "6bd2970ccbf3f2586ad5f268371c352e40a369814945617c02bd223ce9e227cf"
TOKENS_SHA256 = "d75e93627171e736c3042e8479631fd6ec5aa55abc00b3b950baa5a57ab1d16a"
"""With tokenizers 0.23.3."""


def fetch_package(name: str, digest: str, cache: Path) -> Path:
    """Returns a package from the cache, and downloads it first if necessary. Checks its digest."""
    path = cache / name
    if not path.exists():
        print(f"downloading {name}", file=sys.stderr)
        address = f"https://files.pythonhosted.org/packages/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{name}"
        with urllib.request.urlopen(address, timeout=300) as response:
            contents = response.read()
        cache.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    if hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest() != digest:
        raise SystemExit(f"{path} is not the package with the digest {digest}: remove it and run this again")
    return path


def read_documents(package: Path) -> Iterator[bytes]:
    """The documents of a package: files of text, of a suitable size, that are not tables of numbers."""
    with tarfile.open(package, "r|gz") as archive:
        for member in archive:
            if not (member.isfile() and member.name.endswith(SUFFIXES) and member.size in SIZES):
                continue
            file = archive.extractfile(member)
            contents = file.read() if file else b""
            if is_text(contents):
                yield contents


def is_text(contents: bytes) -> bool:
    """Whether the contents are UTF-8, with enough letters."""
    letters = np.frombuffer(contents, np.uint8) | 32  # lower case
    if np.mean((letters >= ord("a")) & (letters <= ord("z"))) < LEAST_LETTERS:
        return False
    try:
        contents.decode()
    except UnicodeDecodeError:
        return False
    return True


def fraction(digest: bytes) -> float:
    """A pseudorandom number from 0 to 1, from the first four bytes of a digest."""
    return int.from_bytes(digest[:4], "big") / 2**32


def make_corpus(folder: Path, cache: Path, only: Sequence[str] = ()) -> dict[str, object]:
    """Writes the tokenizer and the tokens of all packages, or of `only` some. Returns the content of corpus.json."""
    packages = [
        fetch_package(name, digest, cache)
        for name, digest in PACKAGES.items()
        if not only or name.partition("-")[0] in only
    ]
    unique = {hashlib.sha256(text).digest(): text for package in packages for text in read_documents(package)}
    digests = sorted(unique, key=lambda digest: digest[::-1])
    sample = [unique[digest] for digest in digests if fraction(digest[4:]) < SAMPLE]
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(sample, VOCABULARY).save(str(folder / "tokenizer.json"))
    parts = {}
    for is_validation, name in NAMES.items():
        documents = (unique[digest] for digest in digests if (fraction(digest) < VALIDATION) == is_validation)
        with (folder / f"{name}.bin").open("wb") as stream:
            parts[name] = write_tokens(documents, str(folder / "tokenizer.json"), stream).count
    tokens = hashlib.sha256(b"".join((folder / f"{name}.bin").read_bytes() for name in NAMES.values()))
    about: dict[str, object] = {
        "corpus_sha256": hashlib.sha256(b"".join(digests)).hexdigest(),
        "tokens_sha256": tokens.hexdigest(),
        "tokenizers": tokenizers.__version__,
        "packages": len(packages),
        "documents": {name: count.documents for name, count in parts.items()},
        "bytes": sum(map(len, unique.values())),
        "tokens": {name: count.tokens for name, count in parts.items()},
    }
    (folder / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path, help="output folder")
    parser.add_argument("--packages", type=Path, help="folder of the packages (default: OUT/packages)")
    parser.add_argument("--only", metavar="NAME,...", help="a smaller corpus, of these packages")
    options = parser.parse_args(arguments)
    only = options.only.split(",") if options.only else ()
    about = make_corpus(options.out, options.packages or options.out / "packages", only)
    print(json.dumps(about, indent=1))
    if only:
        return 0
    expected = {"corpus_sha256": CORPUS_SHA256, "tokens_sha256": TOKENS_SHA256}
    different = [name for name, value in expected.items() if about[name] != value]
    for name in different:
        print(f"error: {name} should be {expected[name]}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
