"""The job of the migration guide, written out: its snippets in one file, with the blanks that it leaves filled in.

The guide prints `get_batch(data_iterator, args)` and calls it with one argument; the second one has a default here.
"""

import mindspeed.megatron_adaptor  # noqa: F401
from megatron.core.enums import ModelType
from megatron.training import get_args
from mindspeed_mm.data import move_to_device
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.training import pretrain
from torch.utils.data import DataLoader

from tests.toys.migrated import CustomDataset, build_parts, compute

config = {"width": 8, "depth": 3}


class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """您的自定义模型类"""

    def __init__(self, config):
        super().__init__(config)
        build_parts(self, **config)

    def forward(self, input_ids, pixels, labels):
        return compute(self, input_ids, pixels, labels)


def build_dataloader(dataset):
    return DataLoader(dataset, batch_size=get_args().micro_batch_size)


def train_valid_test_datasets_provider():
    """Build train, valid, and test datasets."""
    train_dataloader = build_dataloader(CustomDataset())
    valid_dataloader = build_dataloader(CustomDataset())
    test_dataloader = build_dataloader(CustomDataset())

    return train_dataloader, valid_dataloader, test_dataloader


def get_batch(data_iterator, args=None):
    """Generate a batch."""
    if data_iterator is not None:
        batch = next(data_iterator)
    else:
        raise ValueError("Data iterator is None. Unable to retrieve batch.")
    move_to_device(batch, get_args().params_dtype)

    return batch


def model_provider(*args, **kwargs):
    model = CustomModel(config)

    return model


def compute_loss(output_tensor):
    return output_tensor


def loss_func(output_tensor):
    loss = compute_loss(output_tensor)
    return loss


def forward_step(data_iterator, model):
    """Forward step."""
    batch_data = get_batch(data_iterator)
    output_tensor = model(**batch_data)
    return output_tensor, loss_func


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
