"""Fit settings to the device, once torch can tell which one is used."""

from api.config.settings import ServerSettings


def fitted(settings: ServerSettings) -> ServerSettings:
    """Return the settings, with the defaults for GPUs if their device is one. Imports torch.

    Raises:
        ConfigError: the settings name a device that does not exist.
    """
    from lorasrv.worker.device import resolve_device
    from lorasrv.worker.host_memory import free_bytes

    return settings.for_gpu(free_bytes()) if resolve_device(settings.device).type == "cuda" else settings
