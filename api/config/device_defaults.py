"""Fit settings to the device, once torch can say which it is."""

from api.config.settings import ServerSettings


def fitted(settings: ServerSettings) -> ServerSettings:
    """Return the settings with a GPU's defaults if they mean one. Imports torch.

    Raises:
        ConfigError: they name a device that is not there.
    """
    from lorasrv.worker.device import resolve_device
    from lorasrv.worker.host_memory import free_bytes

    return settings.for_gpu(free_bytes()) if resolve_device(settings.device).type == "cuda" else settings
