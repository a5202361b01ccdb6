#include <array>
#include <cstring>

#include "collectives/operation.hpp"
#include "collectives/reduction.hpp"
#include "collectives/rows.hpp"

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

void fold(Communicator& communicator, Request& request) {
    const int size = communicator.size();
    const Reduction reduction(request.call, size);
    const int chunk = request.call.collective == Collective::reduce_scatter ? communicator.rank() : kWholeVector;
    FoldInto folded(reduction, size);
    for (int q = 0; q < size; ++q) {
        folded.source(q, reduction.input_of(communicator.header(q).payload, chunk));
    }
    folded.run(request.call.output, 0, reduction.count(chunk));
}

}  // namespace

void complete_small(Communicator& communicator, Request& request) {
    switch (request.call.collective) {
        case Collective::all_reduce:
        case Collective::reduce_scatter:
            fold(communicator, request);
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
