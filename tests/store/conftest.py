"""What every test of stores begins with."""

from tests.store.kit import _stores_are_closed as _stores_are_closed
