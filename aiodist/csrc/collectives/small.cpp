#include "collectives/blocks.hpp"
#include "collectives/operation.hpp"
#include "collectives/reduction.hpp"
#include "kernels/float_environment.hpp"

namespace aiodist {
namespace {

void move(Communicator& communicator, Request& request) {
    const Blocks blocks(communicator, request.call);
    blocks.make_room(request);
    const int rank = communicator.rank();
    for (int q = 0; q < communicator.size(); ++q) {
        if (const std::uint64_t nbytes = blocks.nbytes(q, rank); nbytes != 0) {
            transfer(blocks.target(q), blocks.source(q, rank, communicator.header(q).payload), 0, nbytes, false);
        }
    }
}

/// `offset`: where the call's part of each payload begins.
void reduce(Communicator& communicator, const Call& call, std::size_t offset) {
    const auto size = static_cast<std::size_t>(communicator.size());
    std::vector<const void*>& payloads = communicator.pointers();
    for (std::size_t q = 0; q < size; ++q) {
        payloads[q] = communicator.header(static_cast<int>(q)).payload + offset;
    }
    const std::size_t count = call.nbytes / call.itemsize;
    const Fold fold = fold_kernel(call.dtype, call.op);
    const FloatEnvironment environment;
    if (call.outputs.empty()) {
        fold(call.output, payloads.data(), size, count, size);
        return;
    }
    std::vector<std::byte> whole(count * itemsize(result_dtype(call.dtype, call.op)));
    fold(whole.data(), payloads.data(), size, count, size);
    unpack(call.target(0, whole.size()), 0, whole.data(), whole.size(), false);
}

void reduce(Communicator& communicator, const Call& call) {
    if ((call.flags & kMany) == 0) {
        reduce(communicator, call, 0);
    }
    std::size_t offset = 0;
    for (const Call& section : call.sections) {
        reduce(communicator, section, offset);
        offset += section.nbytes;
    }
}

void reduce_scatter(Communicator& communicator, Request& request) {
    const int size = communicator.size();
    const Reduction reduction(request.call, size);
    FoldInto folded(reduction, size);
    for (int q = 0; q < size; ++q) {
        folded.source(q, reduction.input_of(communicator.header(q).payload, communicator.rank()));
    }
    folded.run(request.call.output, 0, reduction.count(communicator.rank()));
}

}  // namespace

void complete_small(Communicator& communicator, Request& request) {
    switch (request.call.collective) {
        case Collective::barrier:
            break;
        case Collective::reduce:
            if (request.call.root != communicator.rank()) {
                break;
            }
            [[fallthrough]];
        case Collective::all_reduce:
            reduce(communicator, request.call);
            break;
        case Collective::reduce_scatter:
            reduce_scatter(communicator, request);
            break;
        default:
            move(communicator, request);
            break;
    }
}

}  // namespace aiodist
