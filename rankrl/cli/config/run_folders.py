"""Which run folders are refused before Hydra makes them: those that cannot be, and those that hold a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rankrl.cli.config.composition import composed_config, composing, parsed_flags
from rankrl.cli.config.overrides import longest_overrides
from rankrl.errors import ConfigError
from rankrl.files import check_own, write_atomically
from rankrl.runs.run_folder import RunFolder, check_writable
from rankrl.runs.run_lock import check_free


def check_folders(arguments: Sequence[str]) -> Path | None:
    """Refuse the folder that Hydra is about to make if it cannot be; leave none behind."""
    flags = parsed_flags(arguments)
    if flags.help or flags.hydra_help or flags.cfg or flags.info:
        return None
    before = HydraConfig.instance().cfg
    with composing(flags):
        try:
            overrides = longest_overrides(flags.overrides, multirun=flags.multirun)
            config = copy.deepcopy(composed_config(overrides, with_hydra=True))
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.job.num, config.hydra.job.id = 0, "0"
            HydraConfig.instance().set_config(config)  # for what `${hydra:...}` stands for
            if flags.multirun or config.hydra.mode == RunMode.MULTIRUN:
                sweep = _named(config, "hydra.sweep.dir")
                check_writable(sweep, "hydra.sweep.dir")
                subfolder = str(OmegaConf.select(config, "hydra.sweep.subdir") or "")
                check_writable(sweep / subfolder, "hydra.sweep.subdir")
                _check_reused(config.reuse)
                return sweep
            _check_run_folder(config)
            return None
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"the name of the run folder cannot be read: {reason}") from error
        finally:
            HydraConfig.instance().cfg = before


def refuse_used_folder(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Refuse a folder in which a run has got somewhere already, and say how its options differ from these."""
    if folder.holds_results:
        state = folder.difference(config) or "already"
        raise ConfigError(
            f"{folder.path} holds a run {state}; `rankrl resume={folder.path}` goes on with it; for a new "
            "run choose another folder with hydra.run.dir=FOLDER, or overwrite=true to remove that one"
        )
    check_own(folder.path)


def _check_reused(folder: str | None) -> None:
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"reuse={folder}: there is no such folder; give one that holds finished runs")


def _check_run_folder(config: DictConfig) -> None:
    if config.reuse is not None:
        raise ConfigError(f"reuse={config.reuse} is for the jobs of a sweep; leave it out, or add -m")
    folder = _named(config, "hydra.run.dir")
    check_writable(folder, "hydra.run.dir")
    record = OmegaConf.select(config, "hydra.output_subdir")  # null writes no record of Hydra's
    if record is not None:
        check_writable(folder / str(record), "hydra.output_subdir")
    check_free(folder)
    if config.resume is None and not config.overwrite:
        own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        plain: Any = OmegaConf.to_container(own, resolve=True)
        refuse_used_folder(RunFolder(folder), plain)


def write_record(config: DictConfig, folder: Path) -> None:
    """Write the files in `.hydra`, as Hydra itself would before it is known whether the folder is this run's.

    `hydra.output_subdir` is null for that.
    """
    of_hydra = HydraConfig.get()
    contents = {
        "config": config,
        "hydra": OmegaConf.create({"hydra": of_hydra}),
        "overrides": of_hydra.overrides.task,
    }
    for name, content in contents.items():
        write_atomically(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(content))


def _named(config: DictConfig, option: str) -> Path:
    name = OmegaConf.select(config, option)
    if name in (None, ""):
        raise ConfigError(f"{option} is empty; name a folder")
    return Path(str(name))
