"""The console command `rankrl`, a Hydra application."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

from decomposition import DecompositionError
from rankrl.config.folder import config_folder
from rankrl.config.overrides import check_overrides, resumed_arguments
from rankrl.config.schema import AppConfig
from rankrl.errors import RankrlError, RunStoppedError, StorageError
from rankrl.tasks import get_task
from rankrl.workflow.run_folder import RunFolder

USER_ERROR = 2
INTERRUPTED = 130
log = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
def _run(config: DictConfig) -> None:
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, AppConfig)
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir))
    try:
        task = get_task(settings.task)
        folder.prepare()
        task.run(settings, folder)
    except RunStoppedError as error:
        _leave(error, INTERRUPTED)
    except KeyboardInterrupt:  # outside the search, which finishes its episode first
        _leave(RunStoppedError(folder.path), INTERRUPTED)
    except (RankrlError, DecompositionError) as error:
        _leave(error, USER_ERROR)
    except (OSError, SafetensorError) as error:
        advice = "Check that the folder is writable and that the disk has room; then `rankrl resume=` goes on"
        _leave(
            StorageError(f"a file could not be read or written: {error}. {advice} ({folder.path})."),
            USER_ERROR,
        )


def _leave(error: Exception, code: int) -> None:
    """Print one paragraph and leave."""
    print(f"rankrl: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code)


def main() -> None:
    """Run the command line; errors that a user can cure exit with code 2 and one paragraph."""
    # A user's own network (model._target_) is looked for in the current folder too, as `python -m` does.
    sys.path.insert(0, str(Path.cwd()))
    for chatty in ("onnxscript", "onnx_ir", "torch.onnx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        sys.argv[1:] = resumed_arguments(sys.argv[1:])
        check_overrides(sys.argv[1:])
    except RankrlError as error:
        _leave(error, USER_ERROR)
    _run()


if __name__ == "__main__":
    main()
