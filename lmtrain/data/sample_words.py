"""The words of the sample corpus, in pools from the commonest to the rarest, and its numbers.

Pools that may follow "a" hold no word that would ask for "an".
"""

POOLS: dict[str, str | range] = {
    "men": """Thomas Edmund Henrik Walter Anton Josef Martin Albert Rowan Gustav Emil Hugh Lorenz Oskar Piers Matteo
        Casimir Duncan Felix Niels Bertram Silas Leopold Ambrose Janos Victor Cedric Ruben Ivor Stefan""",
    "women": """Clara Edith Marta Helena Ingrid Rosalind Beatrix Louisa Anneke Sofia Harriet Celia Greta Miriam
        Adela Winifred Katrin Flora Lydia Ottilie Nora Judith Teresa Viola Agnes Elsa Margit Frances Isolde Cornelia""",
    "surnames": """Holloway Marsh Lindqvist Carrow Penhale <unk> Brandt Tessier Okell Varga Whitlock Sorensen Dace
        Hathersage Quill Merriman Novak Ashdown Fenwick Lorimer Castellan Drury Pell Vandermeer Hartnoll Iversen
        Thorne Kestrel Rask Aldous Bramwell Corvin Dunmore Eskola Farrant Gaunt Hesse""",
    "towns": """Harrowby Ellerton Dunmarsh Velden Coldwater Tornholm Saltmere Bramford Kirkhaven Lowick Ostermark
        Pellworth Ravensby Marlow Stanmoor Wexcombe Ashgrove Brackenhurst Carden Dorning Eastmere Fallowby Greyport
        Hallin Innesfield Karlstrand Lindhaven Mossgate Northwell""",
    "rivers": """Tarrow Ishel Wend Callow Orren Brey Sarn Lathe Marrin Osk Tevel Ulder Vane Yeald Ansel Breck Corrin
        Dulas Esker Fenna Garrow Hodd Isen Jorrin Kell""",
    "regions": """Vestmark Hallamshire Norrland Carrick Lowmoor Sundria Tressany Ostland Pembry Galloway Harland
        Wealdon Marchia Skania Borrowdale Thule Merrow Dalmark Averne Corland""",
    "works": """Melusine Ariadne Oberon Tamerlane Rosamunde Perdita Lucinda Orpheus Griselda Semele Philomel
        Endymion Calypso Halcyon Undine Theodora Zenobia Belisario Galatea Nausicaa Leander Hesperus Cymbeline
        Aurora Daphnis""",
    "ships": """Halcyone Northwind Perseverance Swiftsure Corona Valiant Petrel Albatross Meridian Constance Sirius
        Guillemot Resolute Tempest Gannet Boreas Kittiwake Fortune Lapwing Argo Cormorant Nimrod Pelican Dauntless
        Harrier""",
    "villages": """Nettleham Birkby Sollen Marrick Thorpe Hask <unk> Wiston Grell Ambleby Corsey Fenby Hollin
        Ulverby Starling Crowle Dimsby Eggle Foss Tansley""",
    "nations": """Scottish Danish Welsh Swedish Norwegian Dutch Belgian Bohemian Hungarian Polish Portuguese Swiss
        German French Cornish Finnish Breton Flemish Tuscan Bavarian Venetian Catalan""",
    "mood": """lyrical restrained sombre playful tender brilliant melancholy vivid rhythmic delicate bold stern
        graceful warm severe pastoral dreamlike spare witty luminous turbulent serene passionate formal rustic
        brooding mysterious nimble vigorous nostalgic mournful joyful subtle clear solemn gentle rich dark quiet
        colourful""",
    "quality": """harmony rhythm texture <unk> melody colour humour drama detail feeling structure pace imagery
        clarity invention atmosphere simplicity symmetry energy irony wit ambition language restraint tension
        movement""",
    "musician": """pianist violinist conductor <unk> cellist singer flautist teacher harpist bandmaster choirmaster
        publisher critic""",
    "scholar": """writer philosopher historian painter poet collector diplomat naturalist linguist mathematician
        geographer physician librarian translator""",
    "pieces": """songs waltzes marches hymns sonatas preludes quartets ballads lullabies nocturnes dances overtures
        fantasies studies psalms serenades""",
    "piece": "song waltz march hymn sonata prelude quartet ballad lullaby nocturne dance fugue fantasy chorus serenade",
    "forms": "opera symphony cantata oratorio ballet requiem suite concerto masque mass",
    "instruments": """piano violin harp <unk> flute cello oboe clarinet horn lute viola bassoon trumpet guitar organ
        drum zither""",
    "trade": """miller baker tailor <unk> schoolmaster watchmaker carpenter fisherman lawyer doctor merchant
        blacksmith printer weaver farmer surveyor clergyman brewer cooper gardener bookseller notary mason shepherd
        banker tanner pharmacist soldier ferryman judge saddler sailor clockmaker""",
    "trades": """millers bakers tailors <unk> fishermen lawyers merchants blacksmiths printers weavers farmers
        surveyors brewers coopers gardeners booksellers masons shepherds bankers tanners soldiers ferrymen judges
        saddlers sailors""",
    "disaster": "fire flood storm landslide gale siege blizzard riot plague",
    "goods": """wool timber salt <unk> grain cheese tin copper slate linen leather paper glass wine barley flax
        honey coal butter herring rope hides beer tea sugar cotton silk marble lead cider tobacco wax iron pottery
        lace apples cattle granite potatoes onions""",
    "quiet": """small quiet prosperous remote busy walled compact windy picturesque crowded handsome scattered
        fortified pleasant poor lively secluded modest tidy stately draughty shady spacious gloomy cheerful
        weathered charming""",
    "sort": "market mill harbour cathedral fishing mining spa garrison border river weaving hill",
    "land": """hills moors forests marshes uplands valleys meadows mountains lowlands islands orchards pastures
        heathlands vineyards dunes wolds""",
    "build": """church castle harbour windmill lighthouse library theatre chapel school hospital brewery tower
        cathedral museum monastery quay warehouse station hotel garden""",
    "stone": """granite limestone sandstone brick timber bronze slate steel marble flint concrete cedar chalk clay
        lead zinc""",
    "tree": "oak birch willow pine beech alder ash rowan larch elm maple hazel juniper spruce lime poplar",
    "bird": """herons kingfishers curlews swans warblers owls geese plovers dippers swallows ducks cranes finches
        gulls larks buzzards""",
    "fish": "trout salmon pike eels perch carp grayling bream sturgeon roach",
    "beast": "otters deer foxes badgers hares beavers martens squirrels stoats goats ponies wolves bats seals",
    "flora": """orchids ferns mosses <unk> lilies heathers gentians sedges saxifrages primroses grasses lichens
        irises roses violets thistles poppies""",
    "hue": """white yellow pale blue crimson purple scarlet golden silver green violet brown pink grey cream
        turquoise black russet lilac""",
    "leaf": """hairy narrow waxy toothed glossy broad fleshy lobed curled pointed woolly smooth silky spiny fragrant
        climbing creeping trailing spotted mountain marsh northern rare common""",
    "weather": "storm fog gale snow frost rain ice wind flood drought hail mist thunder sleet cloud darkness dust heat",
    "hull": "steel bronze teak pine larch elm copper brass cedar maple",
    "cargo": """grain timber passengers coal mail wool machinery tea sugar cotton livestock copper rice coffee wine
        emigrants ore cement fruit bricks""",
    "kind": "cargo passenger mail coastal whaling hospital cable training survey merchant",
    "title1": """Silent Broken Winter Hidden Crooked Distant Silver Burning Lost Empty Painted Borrowed Patient
        Second Drowned Narrow Copper Sleeping Northern Wandering Gilded Stolen Glass Last Paper""",
    "title2": """Garden Harbour Lantern Orchard Bridge Island Letter Mirror Winter Clock Window House Road Ferry
        Crown Stranger Sister Well Tower Map Meadow Candle Shore Library Inheritance""",
    "plot": """debt secret marriage murder will journey shipwreck quarrel letter theft promise trial betrayal rumour
        fire portrait lawsuit fever duel fortune""",
    "person": """widow governess clerk smuggler painter schoolmaster priest nurse soldier banker gardener sailor
        doctor judge dancer publisher gambler beekeeper""",
    "place": """lighthouse house sanatorium rectory farm mill monastery hotel prison theatre villa workshop castle
        cottage school""",
    "tail": "bright faint curved double long straight broad dusty bluish reddish",
    "stars": """Lyra Cygnus Draco <unk> Perseus Cassiopeia Leo Taurus Orion Virgo Pegasus Cepheus Gemini Hydra
        Corvus Libra Sagitta Delphinus Lepus""",
    "month": "May June September October March April July August November January February December",
    "season": "spring autumn winter summer",
    "few": "two three four five six seven eight nine ten twelve",
    "young": "seven six eight nine five ten eleven four twelve",
    "tens": "twenty thirty forty fifty sixty eighty",
    "day": range(1, 29),
    "years": range(1770, 1870),
    "hundreds": range(100, 1000, 50),
    "small": range(2, 40),
    "percent": range(5, 60),
    "tenth": range(1, 10),
    "lifespan": range(58, 88),
    "youth": range(14, 20),
    "adult": range(20, 26),
    "prime": range(26, 46),
    "soon": range(1, 7),
    "later": range(8, 30),
    "rank": """humble skilled poor travelling retired famous village respected young lazy gifted stubborn wealthy
        cheerful lonely clever silent foreign local nervous devoted bankrupt proud generous tired cautious sleepy
        brave honest careless polite superstitious""",
    "fine": """fine cheap coarse <unk> local foreign good plain scarce costly fresh raw pure damaged stolen untaxed
        superior imported common smoked dried polished heavy light bitter rough precious genuine golden""",
    "wild": """rare shy wild <unk> tame spotted common young nesting crested marsh mountain nocturnal wandering
        small grey ringed handsome noisy solitary northern playful timid graceful golden hungry migrating friendly
        curious delicate""",
    "old": """old new former upper lower royal public ruined great little central parish medieval private second
        restored forgotten principal military town""",
    "sold": """sold bought made gathered stored carried mended weighed collected packed counted smuggled prepared
        delivered""",
    "sell": "sell make export store import buy refine pack ship tax collect supply process hoard",
    "went": "moved went travelled sailed walked fled hurried retired rode drifted",
    "praised": """praised admired welcomed disliked mocked noticed enjoyed discussed doubted missed attacked
        defended questioned celebrated forgave envied""",
    "saw": """saw met counted drew sketched described noticed watched followed painted photographed recorded heard
        studied""",
    "slowly": """slowly carefully quietly openly gladly reluctantly quickly secretly finally suddenly patiently
        eagerly soon privately later proudly calmly wisely rarely boldly happily warmly kindly sternly loudly sadly
        seriously sometimes always regularly politely briefly""",
    "wrote": """wrote finished planned revised sketched copied published arranged began abandoned burned dictated
        printed lost improved""",
}
