// Grid-level control: programmatic dependent launch and register redistribution.
#pragma once

namespace flashmla::cuda::ptx {

// Waits until the grids that this one depends on are complete and their writes visible. Returns at
// once in an ordinary launch.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the dependent grid be scheduled once every block has said so or has ended.
__device__ __forceinline__ void allow_next_grid() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// What this thread wrote before is seen by all of the device before what it does next.
__device__ __forceinline__ void fence_device() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashmla::cuda::ptx
