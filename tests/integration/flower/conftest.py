from tests.federation.conftest import quick_disk

__all__ = ["quick_disk"]
