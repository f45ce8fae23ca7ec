"""The command `tessera serve MODEL`: a model behind OpenAI's API."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera.cli.run import CodecOption, FamilyOption, TrustFlag, check_path
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.server.settings import Settings

Blocks = Annotated[int | None, typer.Option("--blocks", min=1, help="KV cache blocks of 16 tokens; default: by memory")]
MaxRequests = Annotated[int, typer.Option("--max-requests", min=1, help="limit of requests; more get status 429")]
_PACKAGES = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def serve(
    model: Annotated[Path, typer.Argument(help="run, checkpoint, adapters or Hugging Face folder")],
    host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0: all")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="name of the model for clients; default: that of its folder")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option("--adapter", help="NAME=FOLDER: LoRA that requests may name; again for more")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="TESSERA_API_KEY", help="key that clients must send")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=1, help="tokens of prompt and answer; default: the model's")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="limit of answers that are computed together")] = 256,
    blocks: Blocks = None,
    max_requests: MaxRequests = 1024,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="seconds that an answer may take")] = 600,
    drain: Annotated[float, typer.Option("--drain", min=0, help="seconds for open answers after SIGTERM")] = 30,
    allow_urls: Annotated[bool, typer.Option("--allow-urls", help="download media by http(s) URL")] = False,
    allow_files: Annotated[
        Path | None, typer.Option("--allow-files", help="folder whose media clients may name as file: URLs")
    ] = None,
    allow_adapters: Annotated[
        Path | None, typer.Option("--allow-adapters", help="folder whose adapters clients may load and unload")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option("--allow-origin", help="https://HOST whose pages may use the server; * for all")
    ] = None,
    allow_priority: Annotated[
        bool, typer.Option("--allow-priority", help="let clients set priority: a lower number is served first")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or an accelerator")] = "auto",
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default: as stored")] = None,
    speak: Annotated[
        bool, typer.Option("--speak", help="also load the talker of the folder: answers with sound")
    ] = False,
    codec: CodecOption = None,
    family: FamilyOption = None,
    trust: TrustFlag = False,
) -> None:
    """Serve a model with OpenAI's API: /v1/chat/completions, /v1/audio/speech and more. Ctrl-C or SIGTERM ends it."""
    _check_packages()
    check_path(model)
    adapters = _adapters(adapter or [])
    _check_folders({"--allow-files": allow_files, "--allow-adapters": allow_adapters})
    _check_key(api_key)
    from tessera.server.settings import Settings

    settings = Settings(
        name=name or model.resolve().name,
        max_length=max_length or 0,
        api_key=api_key,
        local_only=_is_loopback(host),
        allow_urls=allow_urls,
        allow_files=None if allow_files is None else allow_files.resolve(),
        allow_adapters=allow_adapters,
        allow_origins=tuple(allow_origin or ()),
        allow_priority=allow_priority,
        max_requests=max_requests,
        timeout_s=timeout,
    )
    _serve(
        settings,
        (host, port),
        drain,
        path=model,
        device=device,
        dtype=dtype,
        family=family,
        trust=trust,
        adapters=adapters,
        max_length=max_length,
        rows=rows,
        blocks=blocks,
        codec=codec,
        speak=speak,
    )


def _serve(settings: Settings, address: tuple[str, int], drain: float, **model: Any) -> None:
    """Bind the port, load the model, and answer requests until a signal. `model`: fields of `ModelOptions`."""
    from tessera.runtime import log
    from tessera.server.app import make_app
    from tessera.server.run import bind, run_server

    if settings.name in model["adapters"]:
        raise TesseraError(
            f"the model and an adapter have the name {settings.name}",
            where="--adapter",
            fix="choose another name for one of them",
            code="adapter.name-of-model",
        )
    with bind(*address) as sock, log.on_screen():
        from tessera.server.start import ModelOptions, start_service

        service = start_service(ModelOptions(**model), settings)
        names = ", ".join([service.settings.name, *service.adapters])
        log.logger().info(f"model: {names}; prompt and answer: at most {service.settings.max_length} tokens")
        if settings.api_key is None and not settings.local_only:
            log.logger().warning("everyone who reaches this address may use the model: set TESSERA_API_KEY")
        try:
            run_server(make_app(service), sock, drain)
        finally:
            service.close()


def _check_key(key: str | None) -> None:
    if key is not None and (not key or not key.isascii() or key != key.strip()):
        raise TesseraError(
            "the key must be ASCII text without spaces around it",
            where="--api-key or TESSERA_API_KEY",
            fix="openssl rand -hex 24 makes one",
            code="environment.bad-api-key",
        )


def _check_packages() -> None:
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise TesseraError(
            f"packages are missing: {', '.join(missing)}",
            where="tessera serve",
            fix="pip install 'tessera-mm[serve]'",
            code="environment.no-server-packages",
        )


def _adapters(words: Sequence[str]) -> dict[str, Path]:
    """Return adapters by name, from words NAME=FOLDER."""
    adapters: dict[str, Path] = {}
    for word in words:
        name, _, folder = word.partition("=")
        if not name.isprintable() or name != name.strip() or not name or not folder or name in adapters:
            raise TesseraError(
                f"not the name and the folder of an adapter: {word!r}",
                where="--adapter",
                fix="--adapter NAME=FOLDER, with a name of its own for each",
                code="adapter.not-a-name-and-folder",
            )
        check_path(Path(folder))
        adapters[name] = Path(folder)
    return adapters


def _check_folders(folders: dict[str, Path | None]) -> None:
    for option, folder in folders.items():
        if folder is not None and not folder.is_dir():
            raise TesseraError(
                f"no such folder: {folder}", where=option, fix="name a folder that exists", code="environment.no-folder"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
