"""Lightning Fabric's strategy: training, a checkpoint, going back to it."""

import common
import lightning
import torch
from lightning.fabric.strategies import DeepSpeedStrategy

args = common.arguments()


class OnCpu(DeepSpeedStrategy):
    """The strategy as it is, without its own check that devices are GPUs."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        self.parallel_devices = [torch.device("cpu", 0)] * len(self.parallel_devices)
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True


strategy = OnCpu(stage=args.stage, process_group_backend="gloo", logging_batch_size_per_gpu=4)
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
report = common.Report(args)
model = common.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(common.Tokens(), batch_size=4))
done = 0
while done < args.steps:
    for batch in loader:
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report.add(loss.detach())
        done += 1
        if done == args.steps:
            break
state = {"model": model, "optimizer": optimizer, "step": done}
folder = args.out.parent / f"{args.out.stem}-state"
fabric.save(str(folder), state)
batch = next(iter(loader))
with torch.no_grad():
    straight = float(model(**batch).loss)
fabric.backward(model(**batch).loss)
optimizer.step()
optimizer.zero_grad()
fabric.load(str(folder), state)
with torch.no_grad():
    again = float(model(**batch).loss)
report.write(straight=straight, again=again, step=state["step"])
