"""Builds ServiceSettings from flags, a YAML file or a Ray Serve `args` mapping.

Called by the command line, by `LLM` and by cluster/app.py. Unknown keys and values out of range raise SettingsError
with the flag's name. It does not read the machine, the model or the environment.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from tandem.configs.autoscaling import AUTOSCALING_KEYS, checked_autoscaling
from tandem.configs.errors import SettingsError
from tandem.configs.foreign_flags import SAME_VALUES, check_foreign, is_foreign, unfolded
from tandem.configs.json_flags import OWN_LAYERS, draft_settings, module_text, served_names
from tandem.configs.options import OPTIONS, Option, option_named, parse_size
from tandem.configs.platform_facts import DEVICE_FLAGS, PLATFORM_FACTS, idle_lines
from tandem.configs.schema import GatewaySettings, ModelSettings, ServiceSettings
from tandem.configs.secrets import HIDDEN, check_keys, without_password

PRESETS = Path(__file__).parent / "presets"
FILE_ONLY_KEYS = ("model", "autoscaling_config")
SERVE_KEYS = (
    "model_loading_config",
    "engine_kwargs",
    "deployment_config",
    "gateway_config",
    "redis_config",
    "lora_config",
    "single_node",
    "allow_unauthenticated_ray",
)
SERVE_IMPORT = "tandem.cluster.app:build"
"""The import_path of Tandem's application in a Ray Serve file."""
OLD_SERVE_IMPORT = SERVE_IMPORT.removeprefix("tandem.")
"""The same before the package was named tandem; refused with the new one named."""
LORA_KEYS = {"dynamic_lora_loading_path": "lora_watch_dir", "max_num_adapters_per_replica": "max_cpu_loras"}
"""Ray Serve LLM's names of lora_config, and the options that they set."""
GATEWAY_NAMES = {"label_selector": "gateway_label_selector"}
"""Keys of gateway_config that are other options beside it, and the only names there for what they say."""
PORT_KEYS = ("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
"""Settings of a port that gateways listen on themselves; under Serve its proxy does."""
GATEWAY_KEYS = (
    *(o.name for o in OPTIONS if o.path.startswith("gateway.") and o.name not in (*PORT_KEYS, *GATEWAY_NAMES.values())),
    *GATEWAY_NAMES,
)
STEP_SIZES = ("max_num_seqs", "max_num_batched_tokens")
NOT_ENGINE_KEYS = (*PORT_KEYS, "redis_url", "queue_timeout")
LORA_SIZES = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_memory_bytes")


def build_settings(
    model: str, values: Mapping[str, Any], autoscaling_config: Mapping[str, Any] | None = None
) -> ServiceSettings:
    """Builds the settings of a service for `model`. values: by option name, with dashes or underscores; None is as if
    not given. SettingsError for an unknown name, a value out of range, or settings that exclude each other."""
    tree: dict[str, Any] = {"engine": {"model": {"model": model}}}
    values = unfolded(values)
    foreign = {name: value for name, value in values.items() if is_foreign(name)}
    tree["without_effect"] = [line for name, value in foreign.items() if (line := check_foreign(name, value))]
    served = served_names(model, values)
    for name, value in values.items():
        option = option_named(name)
        if name in foreign:
            continue
        if option is None:
            raise SettingsError(f"{name} is not a setting{_did_you_mean(name, [o.name for o in OPTIONS])}", name)
        if value is not None:
            _place(tree, option.path, _checked(option, value, served))
    if autoscaling_config is not None:
        tree["autoscaling_config"] = _autoscaling(autoscaling_config, values)
    given = {name.replace("-", "_") for name, value in values.items() if value is not None}
    _place(tree, "engine.scheduler.by_device", [name for name in STEP_SIZES if name not in given])
    settings = _with_draft(msgspec.convert(tree, ServiceSettings))
    _check_together(settings)
    _refuse_unused(settings, given)
    if (device := settings.engine.device.device) is None:
        return settings
    idle = idle_lines([flag for flag in DEVICE_FLAGS if flag.removeprefix("--").replace("-", "_") in given], device)
    return msgspec.structs.replace(settings, without_effect=(*settings.without_effect, *idle))


def _with_draft(settings: ServiceSettings) -> ServiceSettings:
    """Returns the settings with those of the draft model beside the model's, so that each machine finds both. Layers of
    the model that guess are in its own folder."""
    drafts, model = settings.engine.speculative, settings.engine.model
    if drafts is None or (drafts.model is None and drafts.method != OWN_LAYERS):
        return settings
    draft = ModelSettings(
        model=drafts.model or model.model,
        revision=drafts.revision if drafts.model else model.revision,
        quantization=drafts.quantization,
        dtype=model.dtype,
        load_format="dummy" if model.load_format == "dummy" else "safetensors",
        seed=model.seed,
        trust_remote_code=model.trust_remote_code,
        batch_invariant=model.batch_invariant,
        enforce_eager=model.enforce_eager,
    )
    engine = msgspec.structs.replace(settings.engine, model=msgspec.structs.replace(model, draft=draft))
    return msgspec.structs.replace(settings, engine=engine)


def read_config_file(path: str) -> dict[str, Any]:
    """Reads a --config YAML file or a preset: values by option name, `model`, `autoscaling_config`. SettingsError when
    it cannot be read or has an unknown key."""
    loaded = _read_mapping(path)
    if "applications" in loaded:
        start = f"start it with `serve run {path}`, without `tandem serve`"
        raise SettingsError(f"{path} is a Ray Serve file: {start}", "--config")
    known = [*FILE_ONLY_KEYS, *(o.name for o in OPTIONS)]
    for key in loaded:
        if key.replace("-", "_") not in known and not is_foreign(key):
            raise SettingsError(f"{path}: {key} is not a setting{_did_you_mean(key, known)}", "--config")
    return {key.replace("-", "_"): value for key, value in loaded.items()}


def read_serve_file(path: str) -> list[ServiceSettings]:
    """Reads the settings of each Tandem application in a Ray Serve file. [] for a file without `applications`.
    SettingsError when none is Tandem's, or one has the import_path of before."""
    loaded = _read_mapping(path)
    if "applications" not in loaded:
        return []
    given = loaded["applications"]
    if not isinstance(given, list) or not all(isinstance(app, dict) for app in given):
        raise SettingsError(f"{path}: must be a list of mappings, not {given!r:.80}", "applications")
    paths = [app.get("import_path") for app in given]
    if OLD_SERVE_IMPORT in paths:
        raise SettingsError(f"{path}: import_path {OLD_SERVE_IMPORT} is now {SERVE_IMPORT}", "import_path")
    ours = [app for app in given if app.get("import_path") == SERVE_IMPORT]
    if not ours:
        message = f"{path} is a Ray Serve file, and none of its applications has import_path: {SERVE_IMPORT}"
        raise SettingsError(message, "applications")
    return [settings_from_serve_args(_section(app, "args", None)) for app in ours]


def _read_mapping(path: str) -> dict[str, Any]:
    """Reads the mapping in a YAML file, or in the preset of that name. SettingsError when there is none."""
    preset = PRESETS / f"{path}.yaml"
    file = preset if not Path(path).exists() and preset.exists() else Path(path)
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        presets = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.yaml")))
        raise SettingsError(f"{path} cannot be read: {error.strerror} (presets: {presets})", "--config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {error}".replace("\n", " "), "--config") from error
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise SettingsError(f"{path} must hold a mapping of settings", "--config")
    return loaded


def merge_config(path: str | None, model: str | None, flags: Mapping[str, Any]) -> ServiceSettings:
    """Builds settings from a --config file (or preset) and flags, which win. flags: only those that were given.
    SettingsError also when neither names a model."""
    values = read_config_file(path) if path is not None else {}
    autoscaling = values.pop("autoscaling_config", None)
    named = values.pop("model", None)
    if not isinstance(model or named, str):
        raise SettingsError("no model: give it as the argument, or as `model` in the --config file", "MODEL")
    if autoscaling is not None and not isinstance(autoscaling, dict):
        raise SettingsError("autoscaling_config must be a mapping", "autoscaling_config")
    if autoscaling is not None and "data_parallel_size" in flags:
        raise SettingsError("autoscaling_config chooses the number of groups", "--data-parallel-size")
    return build_settings(model or str(named), {**unfolded(values), **unfolded(flags)}, autoscaling)


def settings_from_serve_args(args: Mapping[str, Any], gateways: int = 1) -> ServiceSettings:
    """Builds settings from the `args` of a Ray Serve application, in the shape of Ray Serve LLM's LLMConfig. gateways:
    how many where args do not say.
    `single_node` and `allow_unauthenticated_ray` are only checked here; cluster/app.py reads them. SettingsError for an
    unknown key or a bad value."""
    _refuse_unknown(args, SERVE_KEYS, "args")
    for name in ("single_node", "allow_unauthenticated_ray"):
        if not isinstance(args.get(name), bool | None):
            raise SettingsError(f"{args[name]!r} must be true or false", name)
    loading = _section(args, "model_loading_config", ("model_id", "model_source"))
    deployment = _section(args, "deployment_config", ("autoscaling_config", "num_replicas", "max_surge_percent"))
    values = {**_section(args, "engine_kwargs", None)}
    gateway = _section(args, "gateway_config", GATEWAY_KEYS)
    values |= {GATEWAY_NAMES.get(key, key): value for key, value in gateway.items()}
    values |= _section(args, "redis_config", ("redis_url", "redis_timeout_ms"))
    for name in _section(args, "engine_kwargs", None):
        if name.replace("-", "_") in NOT_ENGINE_KEYS:
            raise SettingsError(f"{name} does not belong to engine_kwargs", name)
    values = {**_lora_values(args), **values}
    model = loading.get("model_source") or loading.get("model_id")
    if not isinstance(model, str):
        raise SettingsError("model_source (or model_id) must name a model", "model_loading_config")
    if loading.get("model_id") is not None:
        values.setdefault("served_model_name", [loading["model_id"]])
    if deployment.get("num_replicas") is not None:
        values["data_parallel_size"] = deployment["num_replicas"]
    if "api_server_count" not in {name.replace("-", "_") for name in values}:
        values["api_server_count"] = gateways
    settings = build_settings(model, values, deployment.get("autoscaling_config"))
    return msgspec.structs.replace(settings, max_surge_percent=_surge(deployment.get("max_surge_percent")))


def _surge(given: Any) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 100):
        raise SettingsError(f"{given!r} must be a whole number from 0 to 100", "max_surge_percent")
    return given


def _lora_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Values from `lora_config`, by option name. Its presence enables adapters."""
    if "lora_config" not in args:
        return {}
    section = _section(args, "lora_config", LORA_KEYS)
    return {"enable_lora": True} | {LORA_KEYS[key]: value for key, value in section.items()}


def resolved_yaml(settings: ServiceSettings) -> str:
    """Writes the settings with all defaults as YAML, with keys and passwords replaced by "(hidden)"."""
    gateway = settings.gateway
    names = ("api_keys", "admin_keys", "metrics_keys")
    hidden = {name: (HIDDEN,) * len(getattr(gateway, name)) for name in names}
    gateway = msgspec.structs.replace(gateway, **hidden)
    redis = settings.redis
    if redis.url is not None:
        redis = msgspec.structs.replace(redis, url=without_password(redis.url))
    shown = msgspec.to_builtins(msgspec.structs.replace(settings, gateway=gateway, redis=redis))
    del shown["without_effect"]  # lines about flags that are no settings
    scheduler = shown["engine"]["scheduler"]
    scheduler |= dict.fromkeys(scheduler.pop("by_device"))
    return yaml.safe_dump(shown, sort_keys=False)


def default_of(option: Option) -> Any:
    """The value in ServiceSettings of an option that was not given."""
    value: Any = build_settings("model", {})
    for part in option.path.split("."):
        value = getattr(value, part)
    return value


def _checked(option: Option, value: Any, served: Collection[str]) -> Any:
    """Converts a value to the option's kind and checks its range. SettingsError names the flag, and the value unless it
    is a secret. served: names of the model, which an adapter may repeat."""
    value = _read(option, value, served)
    if get_origin(option.kind) is Literal and value not in get_args(option.kind):
        raise SettingsError(f"{value!r} is not one of {', '.join(get_args(option.kind))}", option.flag)
    shown = HIDDEN if option.secret else repr(value)
    try:
        converted = msgspec.convert(value, option.kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{shown}: {str(error)[0].lower()}{str(error)[1:]}", option.flag) from error
    if isinstance(converted, int) and not -(2**63) <= converted < 2**63:  # messages to ranks hold no more
        raise SettingsError(f"{shown} is no whole number of 64 bits", option.flag)
    if option.check is not None and not option.check(converted):
        raise SettingsError(f"{shown} must be {option.rule}", option.flag)
    return converted


def _read(option: Option, value: Any, served: Collection[str]) -> Any:
    """Reads what a text stands for: a size, JSON, one item of a list. Other values stay as they are."""
    origin = get_origin(option.kind)
    if isinstance(value, str):
        value = SAME_VALUES.get(option.name, {}).get(value, value)
    if option.size and isinstance(value, str):
        return _size(option, value)
    if isinstance(value, str) and (origin is dict or hasattr(option.kind, "__struct_fields__")):
        value = _json_object(option, value)
    if option.name == "speculative_config":
        return draft_settings(value)
    return _items(option, value, served) if origin is tuple else value


def _items(option: Option, value: Any, served: Collection[str]) -> Any:
    items = [value] if isinstance(value, str | Mapping) else value
    if not isinstance(items, list | tuple):
        return items
    if option.name == "lora_modules":
        return [module_text(item, served) for item in items]
    if option.name == "allowed_origins":
        return [origin for item in items for origin in _spliced(item)]
    return items


def _size(option: Option, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"{text!r} is not a size such as 4096, 32k or 2G", option.flag) from error


def _spliced(item: Any) -> list[Any]:
    """The items of a JSON list, which is how vLLM spells several; else the item."""
    if isinstance(item, str) and item.startswith("["):
        with suppress(ValueError):
            return list(json.loads(item))
    return [item]


def _json_object(option: Option, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{text!r} is not JSON: {error}", option.flag) from error


def _place(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value


def _autoscaling(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise SettingsError("autoscaling_config must be a mapping", "autoscaling_config")
    _refuse_unknown(config, AUTOSCALING_KEYS, "autoscaling_config")
    if values.get("data_parallel_size") is not None:
        raise SettingsError("autoscaling_config chooses the number of groups", "data_parallel_size")
    return checked_autoscaling(config)


def _check_together(settings: ServiceSettings) -> None:
    """Checks rules between settings. SettingsError names the flag to change."""
    scheduler, engine = settings.engine.scheduler, settings.engine
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs and STEP_SIZES[1] not in scheduler.by_device:
        raise SettingsError(
            f"{scheduler.max_num_batched_tokens} is less than --max-num-seqs {scheduler.max_num_seqs}",
            "--max-num-batched-tokens",
        )
    cache = engine.cache
    if cache.kv_offloading_gib is not None and not cache.enable_prefix_caching:
        raise SettingsError("KV is found again by its content: this needs prefix caching", "--kv-offloading-size")
    if cache.kv_disk_path is not None and cache.kv_offloading_gib is None:
        raise SettingsError("the disk is below host memory: this needs --kv-offloading-size", "--kv-disk-path")
    if (cache.kv_disk_path is None) != (cache.kv_disk_gib is None):
        raise SettingsError("--kv-disk-path and --kv-disk-size go together", "--kv-disk-size")
    ranks, devices = engine.parallel.tensor_parallel_size, engine.parallel.devices_per_node
    if devices is not None and ranks > devices and ranks % devices:
        why = f"{devices} devices of a node do not divide the {ranks} ranks of a stage (--tensor-parallel-size)"
        raise SettingsError(why, "--devices-per-node")
    _check_adapters(settings)
    _check_doors(settings.gateway)
    if any(not name.strip() for name in engine.model.served_model_name):
        raise SettingsError("a name must not be empty", "--served-model-name")


def _refuse_unused(settings: ServiceSettings, given: Collection[str]) -> None:
    """Refuses settings that would have no effect beside the others. given: option names with underscores."""
    engine, without_drafts = settings.engine, settings.engine.speculative is None
    metrics_of_drafts = settings.gateway.per_request_spec_decode_metrics != "none"
    for is_unused, why, names in (
        (engine.cache.kv_offloading_gib is None, "needs --kv-offloading-size", ("kv_eviction",)),
        (engine.scheduler.batching_policy != "dynamic", "needs --batching-policy dynamic", ("batching_max_delay_ms",)),
        (without_drafts and metrics_of_drafts, "needs --speculative-config", ("per_request_spec_decode_metrics",)),
        (not engine.lora.enable_lora, "needs --enable-lora", LORA_SIZES),
        (not settings.logs.record_mib, "needs --record-mib", ("record",)),
    ):
        for name in names:
            if is_unused and name in given:
                raise SettingsError(why, f"--{name.replace('_', '-')}")
    if engine.device.device is not None:
        facts = PLATFORM_FACTS[engine.device.device]
        for flag in DEVICE_FLAGS:
            if flag in facts.refused and flag.removeprefix("--").replace("-", "_") in given:
                raise facts.refusal(flag)


def _check_doors(gateway: GatewaySettings) -> None:
    """Checks address, certificates, keys and --auth."""
    for flag, path in (("--ssl-keyfile", gateway.ssl_keyfile), ("--ssl-ca-certs", gateway.ssl_ca_certs)):
        if path is not None and gateway.ssl_certfile is None:
            raise SettingsError(f"{path}: needs --ssl-certfile", flag)
    if gateway.ssl_cert_reqs and gateway.ssl_ca_certs is None:
        raise SettingsError("needs --ssl-ca-certs", "--ssl-cert-reqs")
    if gateway.host == "":
        raise SettingsError("must name an address", "--host")
    check_keys(gateway.metrics_keys, "--metrics-api-key")
    for flag, given in (("--api-key", gateway.api_keys), ("--admin-api-key", gateway.admin_keys)):
        check_keys(given, flag)
        if given and gateway.auth == "open":
            raise SettingsError(f"open: without {flag} only, which asks for keys", "--auth")
    if gateway.auth == "open" and not gateway.is_local:
        raise SettingsError(f"open: on loopback only, and --host {gateway.host} is reachable from elsewhere", "--auth")


def _check_adapters(settings: ServiceSettings) -> None:
    lora, adapters = settings.engine.lora, settings.adapters
    if not lora.enable_lora and (adapters.modules or adapters.roots or adapters.watch_dir):
        raise SettingsError("--lora-modules, --lora-root and --lora-watch-dir need it", "--enable-lora")
    if lora.enable_lora and settings.engine.device.cpu_offload_gib:
        raise SettingsError("adapters beside weights that stream are not supported yet", "--cpu-offload-gb")
    names = [module.partition("=")[0] for module in adapters.modules]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{name} is given twice", "--lora-modules")


def _section(args: Mapping[str, Any], name: str, known: Iterable[str] | None) -> Mapping[str, Any]:
    section = args.get(name) or {}
    if not isinstance(section, Mapping):
        raise SettingsError(f"{name} must be a mapping", name)
    if known is not None:
        _refuse_unknown(section, known, name)
    return section


def _refuse_unknown(mapping: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in mapping:
        if key not in known:
            hint = _did_you_mean(key, list(known)) or f"; known are {', '.join(known)}"
            raise SettingsError(f"{where}: {key} is not a setting{hint}", key)


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
