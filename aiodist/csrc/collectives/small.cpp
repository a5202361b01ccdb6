#include <cstring>

#include "collectives/operation.hpp"
#include "collectives/reduction.hpp"
#include "collectives/rows.hpp"
#include "kernels/float_environment.hpp"

namespace aiodist {
namespace {

void all_gather(Communicator& communicator, Request& request) {
    const Call& call = request.call;
    const auto size = static_cast<std::size_t>(communicator.size());
    const std::size_t row = call.nbytes / call.rows;
    for (std::size_t q = 0; q < size; ++q) {
        const Rows<std::byte> to{call.output + q * row, row, size * row};
        unpack(to, 0, communicator.header(static_cast<int>(q)).payload, call.nbytes, false);
    }
}

void broadcast(Communicator& communicator, Request& request) {
    const HeaderCopy& from = communicator.header(request.call.root);
    receive_into(request, from);
    if (request.call.output != request.call.input) {
        std::memcpy(request.call.output, from.payload, from.head.nbytes);
    }
}

void all_reduce(Communicator& communicator, Request& request) {
    const Call& call = request.call;
    const auto size = static_cast<std::size_t>(communicator.size());
    std::vector<const void*>& payloads = communicator.pointers();
    for (std::size_t q = 0; q < size; ++q) {
        payloads[q] = communicator.header(static_cast<int>(q)).payload;
    }
    const FloatEnvironment environment;
    fold_kernel(call.dtype, call.op)(call.output, payloads.data(), size, call.nbytes / call.itemsize, size);
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
        case Collective::all_reduce:
            all_reduce(communicator, request);
            break;
        case Collective::reduce_scatter:
            reduce_scatter(communicator, request);
            break;
        case Collective::all_gather:
            all_gather(communicator, request);
            break;
        case Collective::broadcast:
            broadcast(communicator, request);
            break;
        default:  // a barrier moves nothing
            break;
    }
}

}  // namespace aiodist
