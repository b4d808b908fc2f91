"""Lightning's Trainer: clipping, accumulation, a checkpoint, a second run that goes on from it."""

import common
import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

args = common.arguments()


class OnCpu(DeepSpeedStrategy):
    """The strategy as it is, without its own check that devices are GPUs."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.parallel_devices = [torch.device("cpu", 0)] * len(self.parallel_devices)
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Lit(lightning.LightningModule):
    """The model, and what a step is."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.model, self.losses = common.model(), losses

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        if report is not None:
            report.add(loss.detach())
            self.losses.append(report.values["losses"][-1])
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("validation", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trainer(steps: int) -> lightning.Trainer:
    strategy = OnCpu(stage=args.stage, process_group_backend="gloo", logging_batch_size_per_gpu=2)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        use_distributed_sampler=True,
        **quiet,
    )


report = None
loader = torch.utils.data.DataLoader(common.Tokens(), batch_size=2)
first = trainer(args.steps)
report = common.Report(args)
module = Lit([])
first.fit(module, loader)
losses = list(report.values["losses"])
folder = args.out.parent / f"{args.out.stem}-state"
first.save_checkpoint(str(folder))
later: list[float] = []
trainer(args.steps + 3).fit(Lit(later), loader, ckpt_path=str(folder))
report.values["losses"] = losses
for name in ("seconds", "busy"):
    report.values[name] = report.values[name][: len(losses)]
# A Trainer of its own initializes the trained module again, without an optimizer.
[scores] = trainer(args.steps).validate(module, loader, verbose=False)
report.write(later=later, steps=first.global_step, validation=scores["validation"])
