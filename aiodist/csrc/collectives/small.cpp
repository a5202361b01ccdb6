#include "collectives/blocks.hpp"
#include "collectives/operation.hpp"
#include "collectives/reduction.hpp"
#include "kernels/float_environment.hpp"

namespace aiodist {
namespace {

/// What q brings. This rank's own lies where the caller has it, in a nearer cache than the copy.
const std::byte* payload(const Communicator& communicator, const Call& call, int q) {
    return q == communicator.rank() && call.input != nullptr ? call.input : communicator.header(q).payload;
}

void move(Communicator& communicator, Request& request) {
    const Blocks blocks(communicator, request.call);
    blocks.make_room(request);
    const int rank = communicator.rank();
    for (int q = 0; q < communicator.size(); ++q) {
        const std::uint64_t nbytes = blocks.nbytes(q, rank);
        if (nbytes == 0) {
            continue;
        }
        const auto from = blocks.source(q, rank, payload(communicator, request.call, q));
        const auto to = blocks.target(q);
        if (to.pieces != nullptr || to.base != from.base) {  // else it is in its place
            transfer(to, from, 0, nbytes, false);
        }
    }
}

/// `offset`: where the call's part of each payload begins.
void reduce(Communicator& communicator, const Call& call, std::size_t offset) {
    const auto size = static_cast<std::size_t>(communicator.size());
    std::vector<const void*>& payloads = communicator.pointers();
    for (std::size_t q = 0; q < size; ++q) {
        payloads[q] = payload(communicator, call, static_cast<int>(q)) + offset;
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
        folded.source(q, reduction.input_of(payload(communicator, request.call, q), communicator.rank()));
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
