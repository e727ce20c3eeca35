"""`prefill_torch`, the definition's twin on every device."""

import pytest

from tests.ops.prefill_conformance import PrefillConformance, Subject, subject_of


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of("reference")


class TestReference(PrefillConformance):
    pass
