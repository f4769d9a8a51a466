"""The right-or-wrong half of bench.gpu_check where there is a GPU: backend and graphs against float64, an engine against plain torch."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="flashinfer-python is not installed: pip install 'radixserve[gpu]'")

from bench.gpu_correctness import check_backend, check_engine, check_graph
from bench.gpu_report import Report
from bench.gpu_shapes import SMALL

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (28, 4, 128)])
def test_attention(heads: tuple[int, int, int], page_size: int) -> None:
    report = Report(600.0)
    with torch.inference_mode():
        check_backend(report, heads, page_size, DEVICE)
        check_graph(report, heads, page_size, DEVICE, None)
    assert report.num_wrong == 0, report.table()


@pytest.mark.timeout(600)
def test_engine() -> None:
    report = Report(600.0)
    with torch.inference_mode():
        check_engine(report, SMALL, DEVICE)
    assert report.num_wrong == 0, report.table()
