"""Uploads an export to the Hugging Face Hub. Only `huggingface_hub` reads the token: from HF_TOKEN, or of a login."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.runtime.optional_imports import remedy
from apexreplay.errors import UsageError, describe_exception, require

OPTION = "--push-to-hub"
TIMEOUT_SECONDS = 60.0  # without an answer of the Hub
LOGIN = "run hf auth login, or set HF_TOKEN to a token that may write"


def open_hub(repository: str) -> Any:
    """Returns a client of the Hub; raises UsageError without the package, a token, or a valid name."""
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository, re.ASCII) is not None
    require(is_name, f"{OPTION} must be USER/NAME, got {repository!r}")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UsageError(f"{OPTION}: {error}", f"install the package: {remedy('hub')}") from error
    require(bool(hub.get_token()), f"{OPTION}: there is no token of the Hugging Face Hub", remedy=LOGIN)
    hub.get_session().timeout = TIMEOUT_SECONDS
    return hub.HfApi()


def push(api: Any, repository: str, folder: Path, names: Sequence[str], *, private: bool) -> str:
    """Uploads the named files as one commit, which removes other ONNX files; returns the address of the commit.

    Creates the repository if there is none. Raises UsageError if the Hub refuses or does not answer.
    """
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        problem = f"{OPTION}: {repository} exists and is public"
        require(not private or api.model_info(repository).private, problem, remedy="leave out --private, or rename it")
        message = "Export weights and model card of Ape-X"
        sent = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(names),
            delete_patterns="*.onnx",
            commit_message=message,
        )
    except UsageError:
        raise
    except Exception as error:  # Each version of the package has other classes for the network's errors.
        status = getattr(getattr(error, "response", None), "status_code", None)
        problem, advice = f"the Hub answered with status {status}", "try again later"
        if status is None:
            problem, advice = f"no upload to the Hub ({describe_exception(error)})", "check the network and HF_ENDPOINT"
        elif status == 401:
            problem, advice = "the Hub does not accept the token", LOGIN
        elif status in (403, 404):
            problem, advice = f"the token may not write to {repository}", f"check the name, and {LOGIN}"
        raise UsageError(f"{OPTION}: {problem}; the files are in {folder}", advice) from error
    return str(sent.commit_url)
