import pytest

from tidegate_engine.executor.quality import SAMPLE_TEXT, measure_quality_loss
from tidegate_engine.model.loader import LoadedModel
from tidegate_testing.models import model_cache_dir, tiny_model


def test_a_model_beside_itself_loses_nothing() -> None:
    loss = measure_quality_loss(tiny_model(), "none", text="hello hello 42 hello" * 9)
    assert loss.quantised_perplexity == loss.perplexity > 1
    assert loss.same_choice == 1.0


def test_8_bits_cost_smollm2_little(smollm2: LoadedModel) -> None:
    loss = measure_quality_loss(smollm2, "int8", kernel_cache=model_cache_dir() / "kernels")
    assert loss.num_tokens == len(smollm2.tokenizer.encode(SAMPLE_TEXT)) - 1
    # English and code: a model that reads nonsense is above 1000.
    assert loss.perplexity < 25
    assert loss.quantised_perplexity == pytest.approx(loss.perplexity, rel=0.1)
    assert loss.same_choice > 0.8
    assert str(loss).startswith("perplexity ")
